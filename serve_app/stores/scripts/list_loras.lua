-- args: account
-- list_loras: what the account may use, by creation; reads what it may use and no more. Returns {id, record} for each.
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
for _, id in ipairs(ids) do out[#out + 1] = {id, redis.call('HGETALL', K('lora:' .. id))} end
return out
