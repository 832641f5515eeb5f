-- args: account
-- An account may use what everyone may, what it owns, and what it is offered by id or name. Its grants and denials
-- override these.
local grants = {}
local denials = 0
local decisions = redis.call('HGETALL', K('grants:' .. account))
for i = 1, #decisions, 2 do
  grants[decisions[i]] = decisions[i + 1]
  if decisions[i + 1] ~= 'allow' then denials = denials + 1 end
end

-- Returns LoRA id → place by creation. `read` returns what it wants of an index: {id, place} repeated.
local function usable_places(read)
  local places = {}
  local function add(index)
    local found = read(K(index))
    for i = 1, #found, 2 do places[found[i]] = tonumber(found[i + 1]) end
  end
  add('loras_open')
  add('loras_owned:' .. account)
  add('loras_offered:' .. account)
  local name = redis.call('HGET', K('account:' .. account), 'name')
  if name then add('loras_offered:' .. name) end
  for id, decision in pairs(grants) do
    local place = decision == 'allow' and redis.call('ZSCORE', K('loras'), id)
    places[id] = place and tonumber(place) or nil
  end
  return places
end

-- Returns {id, record} of each, ordered by `comes_before`, of the first `most` where given.
local function first_records(places, most, comes_before)
  local ids = {}
  for id in pairs(places) do ids[#ids + 1] = id end
  table.sort(ids, comes_before)
  local records = {}
  for i = 1, math.min(#ids, most or #ids) do records[i] = {ids[i], redis.call('HGETALL', K('lora:' .. ids[i]))} end
  return records
end
