-- include credential_version
-- args: holder, password_hash
-- set_password: sets the password of a holder (credential_version.lua) and ends its sessions and links. Returns the
-- credential version of sessions from now on, '' without such a holder.
local record = K(record_of(holder))
if redis.call('HEXISTS', record, 'created') == 0 then return '' end
redis.call('HSET', record, 'password', password_hash)
redis.call('HINCRBY', record, 'password_changes', 1)
return credential_version_of(holder)
