-- An API key has a record, and a place in its account's list, which keeps this many of those that no longer work.
local KEPT = 500
local FORGOTTEN = 10 -- of more than that, as a version before kept, at each call

local function read_key(id) return redis.call('HGETALL', K('key:' .. id)) end

-- Returns how many keys of the account work now, without counting `except`, and forgets the oldest that do not.
local function working_keys(account, except)
  local working, ended = 0, {}
  for _, id in ipairs(redis.call('ZRANGE', K('keys:' .. account), 0, -1)) do
    local key = redis.call('HMGET', K('key:' .. id), 'digest', 'revoked', 'expires')
    if not key[1] or key[2] or num(key[3], math.huge) <= now then ended[#ended + 1] = id
    elseif id ~= except then working = working + 1 end
  end
  for i = 1, math.min(#ended - KEPT, FORGOTTEN) do
    redis.call('DEL', K('key:' .. ended[i]))
    redis.call('ZREM', K('keys:' .. account), ended[i])
  end
  return working
end

-- Writes a key. `user` is the invited user who made it, `pepper` the version under which the digest was made, and
-- `life_ms` the time until it expires, nil for never. `scopes` and `adapters` say what it may do, and with which
-- LoRAs; '' or nil is all. `limit` is the number of counted requests in a window of its plan; nil is as many as the
-- plan has.
local function write_key(id, digest, hint, account, name, interfaces, life_ms, scopes, adapters, user, limit, pepper)
  redis.call('HSET', K('key:' .. id), 'digest', digest, 'pepper', pepper, 'hint', hint, 'account', account,
    'name', name, 'interfaces', interfaces, 'created', now)
  if life_ms then redis.call('HSET', K('key:' .. id), 'life', life_ms, 'expires', now + life_ms) end
  if (scopes or '') ~= '' then redis.call('HSET', K('key:' .. id), 'scopes', scopes) end
  if (adapters or '') ~= '' then redis.call('HSET', K('key:' .. id), 'adapters', adapters) end
  if (user or '') ~= '' then redis.call('HSET', K('key:' .. id), 'user', user) end
  if limit then redis.call('HSET', K('key:' .. id), 'limit', limit) end
  redis.call('ZADD', K('keys:' .. account), now, id)
end
