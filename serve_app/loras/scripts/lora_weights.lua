-- Stored weights of LoRAs that nobody may have any more: `loras_unused`, URI → when to look. While a registration stores and
-- records weights it holds them (`weights_in_use`); while a process removes them, nobody can begin to (`loras_removing`).
local function digest_of(uri) return string.match(uri, '/(%x+)[^/]*$') or uri end

local function is_stored(uri) return redis.call('EXISTS', K('loras_stored:' .. digest_of(uri))) == 1 end

-- When the last hold ends, or nil.
local function held_until(uri)
  local in_use = K('weights_in_use:' .. digest_of(uri))
  redis.call('ZREMRANGEBYSCORE', in_use, '-inf', now)
  return redis.call('ZREVRANGE', in_use, 0, 0, 'WITHSCORES')[2]
end
