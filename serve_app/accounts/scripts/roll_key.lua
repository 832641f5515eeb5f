-- include api_key
-- args: old_id, new_id, digest, hint, grace_ms:number, max_keys:number, pepper:number
-- roll_key: a new API key of the same name, interfaces, scopes, adapters, limit and length of life; the old one ends after the grace, or sooner.
-- Returns the new record; {} when the old key does not work (any more); {'full'} when, the old one aside, as many keys of its
-- account as may be work already. Repeating the call changes nothing.
if redis.call('EXISTS', K('key:' .. new_id)) == 1 then return read_key(new_id) end
local old_key = K('key:' .. old_id)
local old = redis.call('HMGET', old_key, 'account', 'name', 'interfaces', 'life', 'expires', 'revoked', 'scopes',
  'adapters', 'user', 'limit')
local ends = num(old[5], math.huge)
if not old[1] or old[6] or ends <= now then return {} end
if working_keys(old[1], old_id) >= max_keys then return {'full'} end
redis.call('HSET', old_key, 'expires', math.min(ends, now + grace_ms))
write_key(new_id, digest, hint, old[1], old[2], old[3], tonumber(old[4]), old[7], old[8], old[9], tonumber(old[10]), pepper)
return read_key(new_id)
