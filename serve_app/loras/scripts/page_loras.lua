-- include usable_loras
-- args: most:number, before_ms:number, before_id
-- page_loras: list the newest `most` LoRAs that the account may use, only those before `before_id` of `before_ms` where
-- given. Those of one millisecond come by id, the last first. It reads no other records, and of each index only the
-- part that may be on the page. Returns {{id, record} of each}.
local OF_ONE_MS = 1000 -- how many places by creation a millisecond has: ROWS_AT_ONE_TIME in catalog.py

local function append_of_one_ms(found, index, ms)
  local first = ms * OF_ONE_MS
  local others = redis.call('ZREVRANGEBYSCORE', index, first + OF_ONE_MS - 1, first, 'WITHSCORES')
  for i = 1, #others do found[#found + 1] = others[i] end
end

local function part_of(index)
  local newest = before_ms and before_ms * OF_ONE_MS - 1 or '+inf'
  local found = redis.call('ZREVRANGEBYSCORE', index, newest, '-inf', 'WITHSCORES', 'LIMIT', 0, most + denials)
  if #found > 0 then append_of_one_ms(found, index, math.floor(found[#found] / OF_ONE_MS)) end
  if before_ms then append_of_one_ms(found, index, before_ms) end
  return found
end

local places, created = usable_places(part_of), {}
for id, place in pairs(places) do
  local ms = math.floor(place / OF_ONE_MS)
  local is_before = not before_ms or ms < before_ms or ms == before_ms and id < before_id
  created[id] = is_before and ms or nil
end
return first_records(created, most, function(a, b)
  if created[a] == created[b] then return a > b end
  return created[a] > created[b]
end)
