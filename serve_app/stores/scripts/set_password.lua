-- include sign_in_fence
-- args: account, password_hash
-- set_password: ends every session of the account and every link to it. Returns the fence of sessions from now on, '' without
-- such an account.
if redis.call('EXISTS', K('account:' .. account)) == 0 then return '' end
redis.call('HSET', K('account:' .. account), 'password', password_hash)
redis.call('HINCRBY', K('account:' .. account), 'password_changes', 1)
return sign_in_fence('account:' .. account)
