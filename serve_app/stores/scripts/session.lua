-- args: token_digest, idle_ms:number
-- session: the account of a live session, whose idle time starts again but never passes its absolute end. Returns its id or ''.
local session = K('session:' .. token_digest)
local fields = redis.call('HMGET', session, 'account', 'ends')
if not fields[1] then return '' end
local left = num(fields[2], 0) - now
if left <= 0 then
  redis.call('DEL', session)
  return ''
end
redis.call('PEXPIRE', session, math.min(left, idle_ms))
return fields[1]
