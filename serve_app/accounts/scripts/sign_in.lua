-- include account
-- args: name, within, name_digest, source, device, device_account, life_ms:number, free_here:number
-- args: first_here_ms:number, longest_here_ms:number, free_all:number, first_all_ms:number, longest_all_ms:number
-- sign_in: counts a try to sign in before the password is looked at, or says how long to wait. Tries are counted
-- for the account (for the text, where no account has this name, or none `within` the given one) and also for each
-- source: an address, or a device on which the account's owner has signed in. Past `free` tries each wait is twice
-- the one before. A wait for what other sources did belongs to the source that was told to wait: when it is over, a
-- try passes, whatever others have done meanwhile. Returns {ms to wait, or 0 for a try that counts; the key of the
-- source's tries}.
local account = account_id_of(name, within)
local who = account ~= '' and account or 'unknown_' .. name_digest
local is_known = device ~= '' and account ~= '' and device_account == account
local here, all = 'sign_in:' .. who .. ':' .. (is_known and device or source), 'sign_in_tries:' .. who

local function wait_after(tries, free, first_ms, longest_ms)
  if tries < free then return 0 end
  return math.min(longest_ms, first_ms * 2 ^ (tries - free))
end

local function wait_for_all()
  if is_known then return 0 end
  return wait_after(num(redis.call('GET', K(all)), 0), free_all, first_all_ms, longest_all_ms)
end

local function wait_until(time_ms)
  redis.call('HSET', K(here), 'next', time_ms)
  redis.call('PEXPIRE', K(here), life_ms)
end

write_also_when_full()
local next_at = tonumber(redis.call('HGET', K(here), 'next'))
if next_at and next_at > now then return {next_at - now, here} end
if not next_at and wait_for_all() > 0 then
  wait_until(now + wait_for_all())
  return {wait_for_all(), here}
end

local tries = redis.call('HINCRBY', K(here), 'tries', 1)
if not is_known then
  redis.call('INCR', K(all))
  redis.call('PEXPIRE', K(all), life_ms)
end
local wait_ms = math.max(wait_after(tries, free_here, first_here_ms, longest_here_ms), wait_for_all())
redis.call('HDEL', K(here), 'next')
redis.call('PEXPIRE', K(here), life_ms)
if wait_ms > 0 then wait_until(now + wait_ms) end
return {0, here}
