-- include credential_version
-- args: name, purpose, holder, id, life_ms:number
-- create_sign_in_link: for one use by whom the record `holder`:`id` is about, until the password is changed or the account disabled.
redis.call('SET', K(name), purpose .. ':' .. id .. ':' .. credential_version_of(holder .. ':' .. id), 'PX', life_ms)
return 1
