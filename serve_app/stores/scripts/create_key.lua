-- include api_key
-- args: key_id, digest, hint, account, name, interfaces, life_ms:number
-- create_key: a new API key; without `life_ms` it never expires. Repeating the call changes nothing.
-- Returns the record; {} without such an account.
if redis.call('EXISTS', K('account:' .. account)) == 0 then return {} end
if redis.call('EXISTS', K('key:' .. key_id)) == 0 then
  write_key(key_id, digest, hint, account, name, interfaces, life_ms)
end
return read_key(key_id)
