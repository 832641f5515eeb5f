-- args: account
-- disable_account: an account's keys and password stop working with the next request, and its sessions and links
-- end for good. Running it twice changes nothing more.
local record = K('account:' .. account)
write_also_when_full()
if redis.call('HSETNX', record, 'disabled', '1') == 1 then redis.call('HINCRBY', record, 'closures', 1) end
