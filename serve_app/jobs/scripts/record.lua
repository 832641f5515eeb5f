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

-- Return what the scripts need of a record, with numbers and lists for their texts: fewer fields than all are read
-- sooner. nil for a job that there is not.
local function read_job(id)
  local field = redis.call('HMGET', K('job:' .. id), 'state', 'kind', 'account', 'group', 'attempt', 'tries', 'work',
    'queue_share', 'sequence', 'waiting_since', 'charge', 'cancel', 'variant', 'rate_token', 'skips', 'skipped_at',
    'num_images', 'worker', 'losses', 'adapter', 'plan', 'created', 'more_adapters', 'base', 'start_by', 'pictures',
    'sample', 'key', 'shown', 'w0')
  if not field[1] then return nil end
  -- The field `kind` names the pool, and `group` the weights; the record of an ended job has neither.
  local pool = field[2] or (string.sub(id, 1, 3) == 'up_' and 'upscale' or 'generation')
  return {
    id = id, state = field[1], pool = pool, account = field[3], weights = field[4] or '', attempt = num(field[5], 0),
    tries = num(field[6], 0), work = num(field[7], 0), queue_share = num(field[8], 1), sequence = num(field[9], 0),
    waiting_since = num(field[10], 0), charge = num(field[11], 0), cancel = field[12], variant = field[13],
    rate_token = field[14] or '', skips = num(field[15], 0), skipped_at = tonumber(field[16]),
    num_images = num(field[17], 1), worker = field[18], losses = num(field[19], 0),
    adapters = lines_of(field[20], field[23]), plan = field[21] or '', created = num(field[22], 0), base = field[24],
    start_by = tonumber(field[25]), pictures = lines_of(nil, field[26]), sample = field[27], key = field[28] or '',
    shown = tonumber(field[29]), webhook = field[30],
  }
end

-- Return what a reader gets: {id, row, position}, or {} for no job. The position is {now}, and of a job that waits
-- {now, workers, accounts, place, seconds_per_unit, ready, ready_work, work, start_seconds}.
local function snapshot(job, row)
  if not job then return {} end
  local position = {now}
  if job.state == 'queued' then
    position = {now, redis.call('ZCARD', K('workers:' .. job.kind)), redis.call('ZCARD', K('vtime:' .. job.kind)),
      redis.call('ZRANK', K('queue:' .. job.kind .. ':' .. job.account), job.id) or -1}
    local load = redis.call('HMGET', K('load:' .. job.kind), 'seconds_per_unit', 'ready', 'ready_work', 'work',
      'start_seconds')
    for i, number in ipairs(load) do position[4 + i] = number or '0' end
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
