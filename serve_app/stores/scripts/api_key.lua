-- An API key's record, and its place in the account's list. It is never removed: what has expired is still listed.
local function read_key(id) return redis.call('HGETALL', K('key:' .. id)) end

-- life_ms: until it expires, or nil for ever.
local function write_key(id, digest, hint, account, name, interfaces, life_ms)
  redis.call('HSET', K('key:' .. id), 'digest', digest, 'hint', hint, 'account', account, 'name', name,
    'interfaces', interfaces, 'created', now)
  if life_ms then redis.call('HSET', K('key:' .. id), 'life', life_ms, 'expires', now + life_ms) end
  redis.call('ZADD', K('keys:' .. account), now, id)
end
