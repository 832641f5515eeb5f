-- args: key_id, key_digest
-- Who is calling, within which plan: key → account → plan → count (window.lua).
local USED_EVERY = 60000 -- ms between two writes of "last used": polls stay reads

-- {status, account id, account name, plan name, used, the window's end, now, scopes, adapters}; status: ok, limited, unknown,
-- other_interface (a key that works, but not on this interface). Times are in ms. Scopes and adapters are the key's, '' for all.
local function authenticate()
  local key = redis.call('HMGET', K('key:' .. key_id), 'digest', 'account', 'interfaces', 'revoked', 'used', 'expires',
    'scopes', 'adapters')
  local scopes, adapters = key[7] or '', key[8] or ''
  if key[1] ~= key_digest or key[4] or num(key[6], math.huge) <= now then return refused('unknown') end
  local account_id = key[2]
  local account = redis.call('HMGET', K('account:' .. account_id), 'name', 'disabled', 'plan_' .. interface)
  if not account[1] or account[2] then return refused('unknown') end
  if not string.find(key[3], interface, 1, true) then return refused('other_interface') end

  local status, plan, used, ends = count_request(account_id, account[3])
  if rate_token ~= '' and status == 'ok' and now - num(key[5], 0) >= USED_EVERY then
    redis.call('HSET', K('key:' .. key_id), 'used', now)
  end
  return {status, account_id, account[1], plan, used, ends, now, scopes, adapters}
end
