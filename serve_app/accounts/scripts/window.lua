-- args: interface, plans:list
-- A window counts an account's use of its plan on one interface. Without a rate token nothing is counted; repeating
-- a call with its rate token counts nothing twice. `plans` are name, limit and window (ms) of each plan of the
-- interface, the lowest first. A key with a limit of its own is also counted in a window of its own, which ends
-- with the account's.
local function plan_called(name)
  for i = 1, #plans, 3 do
    if plans[i] == name then return name, tonumber(plans[i + 1]), tonumber(plans[i + 2]) end
  end
  return plans[1], tonumber(plans[2]), tonumber(plans[3])
end

local function rate_window(account_id) return K('rate:' .. account_id .. ':' .. interface) end

local function refused(status)
  local name, _, window_ms = plan_called('')
  return {status, '', '', name, 0, now + window_ms, now, '', '', '', ''}
end

-- Returns status, plan name, used, the window's end, limit. The status is ok, or limited for a request for which
-- the plan, or the key's own limit, leaves no space. `limit` is the smaller of the two, and `used` is it less
-- the requests that both leave.
local function count_request(rate_token, account_id, plan_name, key_id, key_limit)
  local plan, limit, window_ms = plan_called(plan_name)
  local window = rate_window(account_id)
  local used = redis.call('ZCARD', window)
  local first = redis.call('ZRANGE', window, 0, 0, 'WITHSCORES')
  local ends = num(first[2], now + window_ms)
  local key_window = window .. ':' .. key_id
  if key_limit then
    local left = math.min(limit - used, key_limit - redis.call('ZCARD', key_window))
    limit = math.min(limit, key_limit)
    used = limit - left
  end
  if rate_token == '' then return 'ok', plan, used, ends, limit end
  if used >= limit then
    local is_counted = redis.call('ZSCORE', window, rate_token)
    return is_counted and 'ok' or 'limited', plan, used, ends, limit
  end
  -- so that jobs can be canceled and deleted; accept.lua refuses its own job
  if call_also_when_full('ZADD', window, ends, rate_token) == 0 then return 'ok', plan, used, ends, limit end
  if not first[1] then redis.call('PEXPIREAT', window, ends) end
  if key_limit then
    redis.call('ZADD', key_window, ends, rate_token)
    redis.call('PEXPIREAT', key_window, ends)
  end
  return 'ok', plan, used + 1, ends, limit
end
