-- include loras/permission
-- A job's record, as the scripts and its readers get it, and what holds of an attempt.
-- A job that lost this many workers must run alone: then only the one at fault meets the attempt cap.
local QUARANTINE_LOSSES = 2

-- Return a record by the names of its fields, and as a row of names and values; nil for a job that there is not.
local function read_record(id)
  local row, job = redis.call('HGETALL', K('job:' .. id)), {id = id}
  for i = 1, #row, 2 do job[row[i]] = row[i + 1] end
  return job.state and job, row
end

-- Return a list of what a field has, if there is one, and of the lines of another.
local function lines_of(first, more)
  local found = {first or nil}
  for line in string.gmatch(more or '', '[^\n]+') do found[#found + 1] = line end
  return found
end

-- Return a record with numbers and lists for their texts, and with its `row`; nil for a job that there is not.
local function read_job(id)
  local job, row = read_record(id)
  if not job then return nil end
  for _, name in ipairs({'attempt', 'tries', 'work', 'sequence', 'waiting_since', 'charge', 'skips', 'losses', 'created'}) do
    job[name] = num(job[name], 0)
  end
  for _, name in ipairs({'rate_token', 'plan', 'key'}) do job[name] = job[name] or '' end
  job.row, job.queue_share, job.num_images = row, num(job.queue_share, 1), num(job.num_images, 1)
  -- The field `kind` names the pool, and `group` the weights; the record of an ended job has neither.
  job.pool = job.kind or (string.sub(id, 1, 3) == 'up_' and 'upscale' or 'generation')
  job.weights, job.adapters = job.group or '', lines_of(job.adapter, job.more_adapters)
  job.pictures = lines_of(nil, job.pictures)
  job.skipped_at, job.start_by = tonumber(job.skipped_at), tonumber(job.start_by)
  return job
end

-- Return what a reader gets: {id, row, position}, or {} for no job. The position is {now}, and of a job that waits {now,
-- workers, accounts, place, seconds_per_unit, ready, ready_work, work, start_seconds}.
local function snapshot(job, row)
  if not job then return {} end
  local position = {now}
  if job.state == 'queued' then
    position = {now, redis.call('ZCARD', K('workers:' .. job.kind)), redis.call('ZCARD', K('vtime:' .. job.kind)),
      redis.call('ZRANK', K('queue:' .. job.kind .. ':' .. job.account), job.id) or -1}
    for i, number in ipairs(redis.call('HMGET', K('load:' .. job.kind), 'seconds_per_unit', 'ready', 'ready_work', 'work',
      'start_seconds')) do position[4 + i] = number or '0' end
  end
  return {job.id, row, position}
end

-- Whether the account may still use the job's adapters, asked again while it waits and runs; an upscale has none.
local function keeps_adapters(job)
  for _, adapter in ipairs(job.adapters) do
    if not may_use_adapter(job.account, adapter) then return false end
  end
  return true
end

local function holds_lease(job, attempt) return job and job.state == 'running' and job.attempt == attempt end

-- Count a call of a worker that lost its lease, which must stay rare; by pcall, since a full server refuses to count.
local function fenced()
  redis.pcall('HINCRBY', K('count'), 'fenced', 1)
  return 'fenced'
end
