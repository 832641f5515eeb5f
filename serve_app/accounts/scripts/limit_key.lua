-- include api_key
-- args: key_id, limit:number
-- limit_key: lets a key make `limit` counted requests in a window of its plan; without `limit`, as many as the plan
-- has. Returns the record; {} for a key that no longer works. Repeating the call changes nothing.
local record = K('key:' .. key_id)
local key = redis.call('HMGET', record, 'digest', 'revoked', 'expires')
if not key[1] or key[2] or num(key[3], math.huge) <= now then return {} end
if limit then redis.call('HSET', record, 'limit', limit) else redis.call('HDEL', record, 'limit') end
return read_key(key_id)
