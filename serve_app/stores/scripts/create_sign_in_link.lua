-- include sign_in_fence
-- args: name, purpose, holder, id, life_ms:number
-- create_sign_in_link: for one use by whom the record `holder`:`id` is about, until the password is changed or the account disabled.
redis.call('SET', K(name), purpose .. ':' .. id .. ':' .. sign_in_fence(holder .. ':' .. id), 'PX', life_ms)
return 1
