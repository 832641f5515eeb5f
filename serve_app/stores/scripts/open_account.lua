-- open_account: a name belongs to one account. Repeating the call with the same id changes nothing.
-- ARGV: account id, name, plan_a, plan_b, password hash or ''
local id, name = ARGV[1], ARGV[2]
local holder = redis.call('GET', K('name:' .. name))
if holder and holder ~= id then return 'taken' end
if redis.call('EXISTS', K('account:' .. id)) == 1 then return 'ok' end
redis.call('SET', K('name:' .. name), id)
redis.call('HSET', K('account:' .. id), 'name', name, 'plan_a', ARGV[3], 'plan_b', ARGV[4], 'created', now)
if ARGV[5] ~= '' then redis.call('HSET', K('account:' .. id), 'password', ARGV[5]) end
redis.call('ZADD', K('accounts'), now, id)
return 'ok'
