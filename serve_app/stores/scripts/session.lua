-- include sign_in_fence
-- args: token_digest, idle_ms:number
-- session: the account of a live session, whose idle time starts again but never passes its absolute end. Returns its id or ''.
local session = K('session:' .. token_digest)
local fields = redis.call('HMGET', session, 'account', 'ends', 'fence')
if not fields[1] then return '' end
local left = num(fields[2], 0) - now
if left <= 0 or (fields[3] or '0.0') ~= sign_in_fence('account:' .. fields[1]) then
  redis.call('DEL', session)
  redis.call('SREM', K('sessions:' .. fields[1]), token_digest)
  return ''
end
redis.call('HSET', session, 'seen', now)
redis.call('PEXPIRE', session, math.min(left, idle_ms))
return fields[1]
