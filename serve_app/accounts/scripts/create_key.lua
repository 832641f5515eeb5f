-- include api_key
-- args: key_id, digest, hint, account, name, interfaces, life_ms:number, max_keys:number, scopes, adapters, user
-- args: limit:number, pepper:number
-- create_key: makes an API key. Without `life_ms` it never expires; without scopes or adapters it may do everything
-- with every LoRA of its account. Repeating the call changes nothing. Returns the record; {} without such an
-- account; {'full'} when as many of its keys as may be work already.
if redis.call('EXISTS', K('account:' .. account)) == 0 then return {} end
if redis.call('EXISTS', K('key:' .. key_id)) == 0 then
  if working_keys(account, '') >= max_keys then return {'full'} end
  write_key(key_id, digest, hint, account, name, interfaces, life_ms, scopes, adapters, user, limit, pepper)
end
return read_key(key_id)
