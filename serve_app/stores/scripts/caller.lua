-- args: key_id, key_digest, interface, rate_token, plans:list
-- Who is calling, within which plan: key → account → plan → count. Without a rate token nothing is counted; repeating a call with
-- its rate token counts nothing twice. `plans` are name, limit and window (ms) of each plan of the interface, the lowest first.
local USED_EVERY = 60000 -- ms between two writes of "last used": polls stay reads

local function plan_called(name)
  for i = 1, #plans, 3 do
    if plans[i] == name then return name, tonumber(plans[i + 1]), tonumber(plans[i + 2]) end
  end
  return plans[1], tonumber(plans[2]), tonumber(plans[3])
end

local function refused(status)
  local name, _, window_ms = plan_called('')
  return {status, '', '', name, 0, now + window_ms, now, '', ''}
end

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

  local plan, limit, window_ms = plan_called(account[3])
  local window = K('rate:' .. account_id .. ':' .. interface)
  local used = redis.call('ZCARD', window)
  local first = redis.call('ZRANGE', window, 0, 0, 'WITHSCORES')
  local ends = num(first[2], now + window_ms)
  if rate_token == '' or redis.call('ZSCORE', window, rate_token) then
    return {'ok', account_id, account[1], plan, used, ends, now, scopes, adapters}
  end
  if used >= limit then return {'limited', account_id, account[1], plan, used, ends, now, scopes, adapters} end
  redis.call('ZADD', window, ends, rate_token)
  if used == 0 then redis.call('PEXPIREAT', window, ends) end
  if now - num(key[5], 0) >= USED_EVERY then redis.call('HSET', K('key:' .. key_id), 'used', now) end
  return {'ok', account_id, account[1], plan, used + 1, ends, now, scopes, adapters}
end
