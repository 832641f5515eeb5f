-- args: account, removal
-- begin_removal: the account goes on the list of those to be removed, where an earlier `removal` (JSON) of it stays, and is
-- disabled: its keys, sessions and links end for good. Returns what the list has.
write_also_when_full()
redis.call('HSETNX', K('accounts_removing'), account, removal)
if redis.call('EXISTS', K('account:' .. account)) == 1 then
  redis.call('HSET', K('account:' .. account), 'disabled', '1')
  redis.call('HINCRBY', K('account:' .. account), 'closures', 1)
end
return redis.call('HGET', K('accounts_removing'), account)
