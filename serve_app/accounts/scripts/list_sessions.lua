-- include credential_version
-- args: realm, id, digests:list
-- list_sessions: lists which of these sessions of an operator, or of all users of an account, are live, and forgets
-- those that have ended. Returns {digest, user, opened, seen, address, browser} of each.
local found = {}
for _, digest in ipairs(digests) do
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
