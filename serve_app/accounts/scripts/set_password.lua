-- include credential_version
-- args: account, user, password_hash
-- set_password: ends every session of the user, '' for the account's own, and every link to it. Returns the credential version
-- of sessions from now on, '' without such a user.
local record = user == '' and 'account:' .. account or 'user:' .. account .. ':' .. user
if redis.call('EXISTS', K(record)) == 0 then return '' end
redis.call('HSET', K(record), 'password', password_hash)
redis.call('HINCRBY', K(record), 'password_changes', 1)
return user_credential_version(account, user)
