-- args: account, name, plan_a, plan_b, password_hash
-- create_account: a name belongs to one account. `password_hash` may be ''. Repeating the call with the same id
-- changes nothing. Returns ok or taken.
local holder = redis.call('GET', K('name:' .. name))
if holder and holder ~= account then return 'taken' end
if redis.call('EXISTS', K('account:' .. account)) == 1 then return 'ok' end
redis.call('SET', K('name:' .. name), account)
redis.call('HSET', K('account:' .. account), 'name', name, 'plan_a', plan_a, 'plan_b', plan_b, 'created', now)
if password_hash ~= '' then redis.call('HSET', K('account:' .. account), 'password', password_hash) end
redis.call('ZADD', K('accounts'), now, account)
return 'ok'
