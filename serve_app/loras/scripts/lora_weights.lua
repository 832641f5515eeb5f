-- Stored weights that perhaps no LoRA has any more are listed in `loras_unused`: URI → when to look. A registration
-- holds weights while it stores and records them (`weights_in_use`); nobody can begin to while a process removes them
-- (`loras_removing`).
local function digest_of(uri) return string.match(uri, '/(%x+)[^/]*$') or uri end

local function is_stored(uri) return redis.call('EXISTS', K('loras_stored:' .. digest_of(uri))) == 1 end

-- Returns when the last hold ends, or nil.
local function held_until(uri)
  local in_use = K('weights_in_use:' .. digest_of(uri))
  redis.call('ZREMRANGEBYSCORE', in_use, '-inf', now)
  return redis.call('ZREVRANGE', in_use, 0, 0, 'WITHSCORES')[2]
end
