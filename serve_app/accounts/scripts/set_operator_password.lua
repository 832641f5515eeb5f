-- include credential_version
-- args: name, password_hash
-- set_operator_password: ends every session of the operator, and every link to it. Returns the credential version of sessions from
-- now on, '' without such an operator.
local record = 'operator:' .. name
if not redis.call('HGET', K(record), 'created') then return '' end
redis.call('HSET', K(record), 'password', password_hash)
redis.call('HINCRBY', K(record), 'password_changes', 1)
return credential_version_of(record)
