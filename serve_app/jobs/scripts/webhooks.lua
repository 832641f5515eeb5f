-- What webhooks are told of a job's end. The script that ends a job writes the message, one for each end, and a delivery
-- of it for each endpoint of the account and for the job's own address, which has the endpoint `jobs`. The housekeeper
-- delivers them (serve_app/webhooks/delivery.py).
local WEBHOOK_TRIED = 86400000 -- ms that a delivery is tried
local WEBHOOK_LIFE = 7 * WEBHOOK_TRIED -- ms that a delivery can be listed and made again

local function delivery_of(account, endpoint, message)
  return K('webhook_delivery:' .. account .. ':' .. endpoint .. ':' .. message)
end

-- Let a delivery wait until `due` (ms), in the list of its account, which then is in the list of accounts.
local function await_delivery(account, endpoint, message, due)
  redis.call('ZADD', K('webhook_due:' .. account), due, endpoint .. ':' .. message)
  redis.call('ZADD', K('webhooks_due'), 'LT', due, account)
end

local function own_webhook(job)
  local url, part, parts = '', job.webhook, 1
  while part do
    url, part = url .. part, redis.call('HGET', K('job:' .. job.id), 'w' .. parts)
    parts = parts + 1
  end
  return url
end

-- Whether an endpoint is told of jobs that end in a state: its record's `events` have spaces between, '' or nil is all.
local function wants(endpoint, state)
  local disabled, events = unpack(redis.call('HMGET', endpoint, 'disabled', 'events'))
  return not disabled and ((events or '') == '' or string.find(' ' .. events .. ' ', ' job.' .. state .. ' ', 1, true))
end

-- Tell of a job's end, before its record loses what only a job that is under way has. The id of the message is the
-- job's with the number of the end: a failed job may be queued again, and end again. Samples tell nobody.
local function tell_webhooks(job, state)
  local url, endpoints = own_webhook(job), redis.call('ZRANGE', K('webhooks:' .. job.account), 0, -1)
  if url == '' and not endpoints[1] then return end
  if job.sample then return end
  local message = 'msg_' .. job.id .. '_' .. redis.call('HINCRBY', K('job:' .. job.id), 'ends', 1)
  local function tell(endpoint, address)
    local delivery = delivery_of(job.account, endpoint, message)
    redis.call('HSET', delivery, 'job', job.id, 'state', 'waiting', 'ended', state, 'at', now, 'until',
      now + WEBHOOK_TRIED)
    if address then redis.call('HSET', delivery, 'url', address) end
    redis.call('PEXPIRE', delivery, WEBHOOK_LIFE)
    await_delivery(job.account, endpoint, message, now)
  end
  for _, endpoint in ipairs(endpoints) do
    if wants(K('webhook:' .. job.account .. ':' .. endpoint), state) then tell(endpoint) end
  end
  if url ~= '' then tell('jobs', url) end
end
