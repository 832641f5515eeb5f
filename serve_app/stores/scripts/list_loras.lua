-- args: account, most:number, known:number
-- list_loras: what the account may use, by creation, the oldest `most` of it where given; reads no other records.
-- Returns {revision, {{id, record} of each}}; the revision alone where it is the `known` one: then nothing has changed since.
local revision = num(redis.call('GET', K('loras_revision')), 0)
if revision == known then return {revision} end
local places = {}
local function add(index)
  local found = redis.call('ZRANGE', K(index), 0, -1, 'WITHSCORES')
  for i = 1, #found, 2 do places[found[i]] = tonumber(found[i + 1]) end
end
add('loras_open')
add('loras_owned:' .. account)
add('loras_offered:' .. account)
local name = redis.call('HGET', K('account:' .. account), 'name')
if name then add('loras_offered:' .. name) end

local grants = redis.call('HGETALL', K('grants:' .. account))
for i = 1, #grants, 2 do
  local place = redis.call('ZSCORE', K('loras'), grants[i])
  places[grants[i]] = grants[i + 1] == 'allow' and place and tonumber(place) or nil
end

local ids = {}
for id in pairs(places) do ids[#ids + 1] = id end
table.sort(ids, function(a, b)
  if places[a] == places[b] then return a < b end
  return places[a] < places[b]
end)
local out = {}
for i = 1, math.min(#ids, most or #ids) do out[i] = {ids[i], redis.call('HGETALL', K('lora:' .. ids[i]))} end
return {revision, out}
