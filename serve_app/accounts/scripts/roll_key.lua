-- include api_key
-- args: old_id, new_id, digest, hint, grace_ms:number, max_keys:number, pepper:number
-- roll_key: makes an API key of the same name, interfaces, scopes, adapters, limit and length of life; the old one
-- ends after the grace, or sooner. Returns the new record; {} when the old key no longer works; {'full'} when, the
-- old one aside, as many keys of its account as may be work already. Repeating the call changes nothing.
if redis.call('EXISTS', K('key:' .. new_id)) == 1 then return read_key(new_id) end
local old_key = K('key:' .. old_id)
local account, name, interfaces, life, ends, revoked, scopes, adapters, user, limit = unpack(redis.call('HMGET',
  old_key, 'account', 'name', 'interfaces', 'life', 'expires', 'revoked', 'scopes', 'adapters', 'user', 'limit'))
ends = num(ends, math.huge)
if not account or revoked or ends <= now then return {} end
if working_keys(account, old_id) >= max_keys then return {'full'} end
redis.call('HSET', old_key, 'expires', math.min(ends, now + grace_ms))
write_key(new_id, digest, hint, account, name, interfaces, tonumber(life), scopes, adapters, user, tonumber(limit),
  pepper)
return read_key(new_id)
