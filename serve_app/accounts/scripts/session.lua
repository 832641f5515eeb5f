-- include credential_version
-- args: realm, token_digest, idle_ms:number, extends:flag
-- session: whose a live session is. With `extends`, its idle time starts again but never passes its absolute end.
-- Returns {account or operator, user, credential version}, or {}.
local session = K(realm .. 'session:' .. token_digest)
local holder, ends, version = unpack(redis.call('HMGET', session, 'holder', 'ends', 'credential_version'))
if not holder then return {} end
local id, user = string.match(holder, '^%a+:([^:]+):?(.*)$')
local left = num(ends, 0) - now
if left <= 0 or version ~= credential_version_of(holder) then
  redis.call('DEL', session)
  redis.call('SREM', K(realm .. 'sessions:' .. id), token_digest)
  return {}
end
if extends then
  write_also_when_full()
  redis.call('HSET', session, 'seen', now)
  redis.call('PEXPIRE', session, math.min(left, idle_ms))
end
return {id, user, version}
