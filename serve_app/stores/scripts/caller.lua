-- Who is calling, within which plan: key → account → plan → count.
-- ARGV: key id, key digest, variant, receipt or '' (not counted), plan count n, then n × (plan name, limit, window ms);
--       the first plan is the lowest. Repeating a call with its receipt counts nothing twice.
local USED_EVERY = 60000 -- ms between two writes of "last used": polls stay reads

local function plan_named(name)
  local first = 6
  for i = first, 5 + 3 * tonumber(ARGV[5]), 3 do
    if ARGV[i] == name then return name, tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]) end
  end
  return ARGV[first], tonumber(ARGV[first + 1]), tonumber(ARGV[first + 2])
end

local function unknown()
  local name, _, window = plan_named('')
  return {'unknown', '', '', name, 0, now + window, now}
end

-- {status, account id, account name, plan name, used, the window's end, now}; status: ok, limited, unknown. Times are in ms.
local function caller()
  local key_id, digest, variant, receipt = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
  local held = redis.call('HMGET', K('key:' .. key_id), 'digest', 'account', 'interfaces', 'revoked', 'used', 'expires')
  if held[1] ~= digest or held[4] or num(held[6], math.huge) <= now then return unknown() end
  if not string.find(held[3], variant, 1, true) then return unknown() end
  local account = redis.call('HMGET', K('account:' .. held[2]), 'name', 'disabled', 'plan_' .. variant)
  if not account[1] or account[2] then return unknown() end

  local plan, limit, window = plan_named(account[3])
  local counted = K('counted:' .. held[2] .. ':' .. variant)
  local used = redis.call('ZCARD', counted)
  local first = redis.call('ZRANGE', counted, 0, 0, 'WITHSCORES')
  local ends = num(first[2], now + window)
  if receipt == '' or redis.call('ZSCORE', counted, receipt) then
    return {'ok', held[2], account[1], plan, used, ends, now}
  end
  if used >= limit then return {'limited', held[2], account[1], plan, used, ends, now} end
  redis.call('ZADD', counted, ends, receipt)
  if used == 0 then redis.call('PEXPIREAT', counted, ends) end
  if now - num(held[5], 0) >= USED_EVERY then redis.call('HSET', K('key:' .. key_id), 'used', now) end
  return {'ok', held[2], account[1], plan, used + 1, ends, now}
end
