-- Each change of LoRAs or grants has a number, the revision. The log tells which LoRAs have changed after revision
-- `from`, each once, by the last change; `last` is the revision that it goes to.
local LOGGED = 10000 -- so many LoRAs at most: who has not followed for longer reads them all again

local function next_revision()
  local revision = redis.call('INCR', K('loras_revision'))
  if num(redis.call('HGET', K('loras_log'), 'last'), 0) ~= revision - 1 then -- a version without a log changed some
    redis.call('DEL', K('loras_changed'))
    redis.call('HSET', K('loras_log'), 'from', revision - 1)
  end
  redis.call('HSET', K('loras_log'), 'last', revision)
  return revision
end

local function log_change(id)
  local log = K('loras_changed')
  redis.call('ZADD', log, next_revision(), id)
  if redis.call('ZCARD', log) > LOGGED then
    local oldest = redis.call('ZRANGE', log, 0, 0, 'WITHSCORES')
    redis.call('ZREM', log, oldest[1])
    redis.call('HSET', K('loras_log'), 'from', oldest[2])
  end
end
