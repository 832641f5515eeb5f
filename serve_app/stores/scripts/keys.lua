-- An API key's record, and its place in the account's list. It never goes: what has expired is still listed.
local function read_key(id) return redis.call('HGETALL', K('key:' .. id)) end

-- life: ms until it expires, or false for ever.
local function write_key(id, digest, hint, account, name, interfaces, life)
  redis.call('HSET', K('key:' .. id), 'digest', digest, 'hint', hint, 'account', account, 'name', name,
    'interfaces', interfaces, 'created', now)
  if life then redis.call('HSET', K('key:' .. id), 'life', life, 'expires', now + life) end
  redis.call('ZADD', K('keys:' .. account), now, id)
end
