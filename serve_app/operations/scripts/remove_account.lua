-- args: account, name
-- remove_account: the account's record goes, and its name is free unless another account has it by now. Safe to repeat.
redis.call('DEL', K('account:' .. account))
if redis.call('GET', K('name:' .. name)) == account then redis.call('DEL', K('name:' .. name)) end
redis.call('ZREM', K('accounts'), account)
redis.call('HDEL', K('unfinished'), account)
return 1
