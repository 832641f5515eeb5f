-- include api_key
-- args: key_id, limit:number
-- limit_key: counted requests that a key may make in a window of its plan; without `limit`, as many as the plan has.
-- Returns the record; {} for a key that does not work (any more). Repeating the call changes nothing.
local key = redis.call('HMGET', K('key:' .. key_id), 'digest', 'revoked', 'expires')
if not key[1] or key[2] or num(key[3], math.huge) <= now then return {} end
if limit then redis.call('HSET', K('key:' .. key_id), 'limit', limit) else redis.call('HDEL', K('key:' .. key_id), 'limit') end
return read_key(key_id)
