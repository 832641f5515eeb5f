-- include credential_version
-- args: name, purpose, holder, life_ms:number
-- create_sign_in_link: makes a link for one use by the holder (credential_version.lua), which is void when the
-- holder's password is changed or the account disabled.
redis.call('SET', K(name), purpose .. ':' .. holder .. ':' .. credential_version_of(holder), 'PX', life_ms)
return 1
