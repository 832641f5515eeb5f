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

local function add_places(places, found)
  for i = 1, #found, 2 do places[found[i]] = tonumber(found[i + 1]) end
end

-- Add the LoRAs of indexes that are the account's to `places`, LoRA id → place by creation, and apply its grants and
-- denials. `read` returns what it wants of an index: {id, place} repeated.
local function own_places(read, places)
  places = places or {}
  add_places(places, read(K('loras_owned:' .. account)))
  add_places(places, read(K('loras_offered:' .. account)))
  local name = redis.call('HGET', K('account:' .. account), 'name')
  if name then add_places(places, read(K('loras_offered:' .. name))) end
  for id, decision in pairs(grants) do
    local place = decision == 'allow' and redis.call('ZSCORE', K('loras'), id)
    places[id] = place and tonumber(place) or nil
  end
  return places
end

local function usable_places(read)
  local places = {}
  add_places(places, read(K('loras_open')))
  return own_places(read, places)
end

-- Returns {id, record} of each, ordered by `comes_before`, of the first `most` where given.
local function first_records(places, most, comes_before)
  local ids = {}
  for id in pairs(places) do ids[#ids + 1] = id end
  if comes_before then table.sort(ids, comes_before) end
  local records = {}
  for i = 1, math.min(#ids, most or #ids) do records[i] = {ids[i], redis.call('HGETALL', K('lora:' .. ids[i]))} end
  return records
end
