-- include credential_version
-- args: token_digest, idle_ms:number, extends:flag
-- operator_session: whose a live session is, '' when it has ended. With `extends`, its idle time starts again but never passes its
-- absolute end.
local session = K('operator_session:' .. token_digest)
local fields = redis.call('HMGET', session, 'operator', 'ends', 'credential_version')
local name = fields[1]
if not name then return '' end
local left = num(fields[2], 0) - now
if left <= 0 or (fields[3] or '0.0') ~= credential_version_of('operator:' .. name) then
  redis.call('DEL', session)
  redis.call('SREM', K('operator_sessions:' .. name), token_digest)
  return ''
end
if extends then redis.call('PEXPIRE', session, math.min(left, idle_ms)) end
return name
