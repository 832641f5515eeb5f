-- include keys
-- roll_key: a new API key of the same name, interfaces and length of life; the old one ends after the grace, or sooner.
-- ARGV: old key id, new key id, digest, hint, grace ms. Returns the new record; {} when the old key does not work (any more).
-- Repeating the call changes nothing.
local old, id = K('key:' .. ARGV[1]), ARGV[2]
if redis.call('EXISTS', K('key:' .. id)) == 1 then return read_key(id) end
local held = redis.call('HMGET', old, 'account', 'name', 'interfaces', 'life', 'expires', 'revoked')
local ends = num(held[5], math.huge)
if not held[1] or held[6] or ends <= now then return {} end
redis.call('HSET', old, 'expires', math.min(ends, now + ARGV[5]))
write_key(id, ARGV[3], ARGV[4], held[1], held[2], held[3], tonumber(held[4]))
return read_key(id)
