-- include sign_in_fence
-- args: account
-- list_sessions: the account's live sessions, in no order; those that have ended are forgotten. Returns {digest, opened, seen,
-- address, browser} of each, '' for what an older version did not store.
local found, fence = {}, sign_in_fence('account:' .. account)
for _, digest in ipairs(redis.call('SMEMBERS', K('sessions:' .. account))) do
  local row = redis.call('HMGET', K('session:' .. digest), 'fence', 'ends', 'opened', 'seen', 'address', 'browser')
  if row[2] and num(row[2], 0) > now and (row[1] or '0.0') == fence then
    found[#found + 1] = {digest, row[3] or '', row[4] or '', row[5] or '', row[6] or ''}
  else
    redis.call('DEL', K('session:' .. digest))
    redis.call('SREM', K('sessions:' .. account), digest)
  end
end
return found
