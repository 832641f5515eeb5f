-- include credential_version
-- args: token_digest, idle_ms:number
-- session: whose a live session is; its idle time starts again but never passes its absolute end. Returns {account, user, and of
-- an invited user name and role}, or {}.
local session = K('session:' .. token_digest)
local fields = redis.call('HMGET', session, 'account', 'user', 'ends', 'credential_version')
local account, user = fields[1], fields[2] or ''
if not account then return {} end
local left = num(fields[3], 0) - now
if left <= 0 or (fields[4] or '0.0') ~= user_credential_version(account, user) then
  redis.call('DEL', session)
  redis.call('SREM', K('sessions:' .. account), token_digest)
  return {}
end
write_also_when_full()
redis.call('HSET', session, 'seen', now)
redis.call('PEXPIRE', session, math.min(left, idle_ms))
if user == '' then return {account, '', '', ''} end
local own = redis.call('HMGET', K('user:' .. account .. ':' .. user), 'name', 'role')
return {account, user, own[1], own[2]}
