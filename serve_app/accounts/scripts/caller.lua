-- args: key_id, key_digest, older_keys, rate_token, address
-- Finds who is calling, within which plan: key → account → plan → count (window.lua). `older_keys` has the id and
-- digest of the same secret under each older pepper, separated by spaces. `address` is where the request came from,
-- which the key's record keeps with the time.
local USED_EVERY = 60000 -- ms between two writes of "last used": polls stay reads

local function key_fields(id)
  return redis.call('HMGET', K('key:' .. id), 'digest', 'account', 'interfaces', 'revoked', 'used', 'expires', 'scopes',
    'adapters', 'limit')
end

-- Returns the id and the fields of the key, under whichever pepper it was made; nil for an unknown one.
local function find_key()
  local key = key_fields(key_id)
  if key[1] == key_digest then return key_id, key end
  for id, digest in string.gmatch(older_keys, '(%S+) (%S+)') do
    key = key_fields(id)
    if key[1] == digest then return id, key end
  end
end

-- Returns {status, account id, account name, plan name, used, the window's end, now, scopes, adapters, limit, key
-- id}. The status is ok, limited, unknown or other_interface, for a key that works, but not on this interface.
-- Times are in ms. Scopes and adapters are the key's, '' for all.
local function authenticate()
  local id, key = find_key()
  if not id or key[4] or num(key[6], math.huge) <= now then return refused('unknown') end
  local scopes, adapters = key[7] or '', key[8] or ''
  local account_id = key[2]
  local account = redis.call('HMGET', K('account:' .. account_id), 'name', 'disabled', 'plan_' .. interface)
  if not account[1] or account[2] then return refused('unknown') end
  if not string.find(key[3], interface, 1, true) then return refused('other_interface') end

  local status, plan, used, ends, limit = count_request(rate_token, account_id, account[3], id, tonumber(key[9]))
  if rate_token ~= '' and status == 'ok' and now - num(key[5], 0) >= USED_EVERY then
    redis.call('HSET', K('key:' .. id), 'used', now, 'used_from', address)
  end
  return {status, account_id, account[1], plan, used, ends, now, scopes, adapters, limit, id}
end
