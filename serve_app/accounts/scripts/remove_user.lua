-- args: account, user
-- remove_user: removes a user, whose sessions and links end with the record, and revokes the API keys it made.
-- Returns 1, or 0 when there is no such user.
local record = K('user:' .. account .. ':' .. user)
local name = redis.call('HGET', record, 'name')
if not name then return 0 end
for _, id in ipairs(redis.call('ZRANGE', K('keys:' .. account), 0, -1)) do
  local key = redis.call('HMGET', K('key:' .. id), 'user', 'revoked')
  if key[1] == user and not key[2] then redis.call('HSET', K('key:' .. id), 'revoked', '1') end
end
if redis.call('GET', K('name:' .. name)) == account .. ':' .. user then redis.call('DEL', K('name:' .. name)) end
redis.call('DEL', record)
redis.call('ZREM', K('users:' .. account), user)
return 1
