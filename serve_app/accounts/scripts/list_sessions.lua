-- include credential_version
-- args: account
-- list_sessions: the live sessions of all users of an account, in no order; those that have ended are forgotten. Returns {digest,
-- user, opened, seen, address, browser} of each, '' for what an older version did not store.
local found = {}
for _, digest in ipairs(redis.call('SMEMBERS', K('sessions:' .. account))) do
  local row = redis.call('HMGET', K('session:' .. digest), 'credential_version', 'ends', 'user', 'opened', 'seen',
    'address', 'browser')
  if row[2] and num(row[2], 0) > now and (row[1] or '0.0') == user_credential_version(account, row[3] or '') then
    found[#found + 1] = {digest, row[3] or '', row[4] or '', row[5] or '', row[6] or '', row[7] or ''}
  else
    redis.call('DEL', K('session:' .. digest))
    redis.call('SREM', K('sessions:' .. account), digest)
  end
end
return found
