-- include credential_version
-- args: realm, id
-- list_sessions: lists the live sessions of an operator, or of all users of an account, in no order, and forgets
-- those that have ended. Returns {digest, user, opened, seen, address, browser} of each.
local found = {}
for _, digest in ipairs(redis.call('SMEMBERS', K(realm .. 'sessions:' .. id))) do
  local session = K(realm .. 'session:' .. digest)
  local row = redis.call('HMGET', session, 'holder', 'ends', 'credential_version', 'opened', 'seen', 'address',
    'browser')
  if row[1] and num(row[2], 0) > now and row[3] == credential_version_of(row[1]) then
    found[#found + 1] = {digest, string.match(row[1], '^%a+:[^:]+:?(.*)$'), row[4], row[5], row[6], row[7]}
  else
    redis.call('DEL', session)
    redis.call('SREM', K(realm .. 'sessions:' .. id), digest)
  end
end
return found
