-- include credential_version
-- args: holder, password_hash
-- set_password: ends every session of the holder (credential_version.lua), and every link to it. Returns the credential
-- version of sessions from now on, '' without such a holder.
local record = K(record_of(holder))
if redis.call('HEXISTS', record, 'created') == 0 then return '' end
redis.call('HSET', record, 'password', password_hash)
redis.call('HINCRBY', record, 'password_changes', 1)
return credential_version_of(holder)
