-- include usable_loras
-- args: most:number, known:number
-- list_loras: list the LoRAs that the account may use by creation, the oldest `most` where given. It reads no other
-- records. Returns {revision, {{id, record} of each}}, or the revision alone if it is the `known` one: nothing has
-- changed since.
local revision = num(redis.call('GET', K('loras_revision')), 0)
if revision == known then return {revision} end
local places = usable_places(function(index) return redis.call('ZRANGE', index, 0, -1, 'WITHSCORES') end)
return {revision, first_records(places, most, function(a, b)
  if places[a] == places[b] then return a < b end
  return places[a] < places[b]
end)}
