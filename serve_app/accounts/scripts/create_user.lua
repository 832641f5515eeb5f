-- args: account, user, name, role, most:number
-- create_user: makes a user of an account, who is invited by a link. Names of users and accounts are one namespace.
-- Repeating the call changes nothing. Returns ok, taken, full, or '' without such an account.
local record, holder = 'user:' .. account .. ':' .. user, account .. ':' .. user
if redis.call('EXISTS', K('account:' .. account)) == 0 then return '' end
local taken_by = redis.call('GET', K('name:' .. name))
if (taken_by and taken_by ~= holder) or redis.call('EXISTS', K('account:' .. name)) == 1 then return 'taken' end
if redis.call('EXISTS', K(record)) == 1 then return 'ok' end
if redis.call('ZCARD', K('users:' .. account)) >= most then return 'full' end
redis.call('SET', K('name:' .. name), holder)
redis.call('HSET', K(record), 'name', name, 'role', role, 'created', now)
redis.call('ZADD', K('users:' .. account), now, user)
return 'ok'
