-- What readers get of a job: its record, and what an estimate of its end needs.

-- Return a record by the names of its fields, and as a row of names and values; nil for a job that there is not.
local function read_record(id)
  local row, job = redis.call('HGETALL', K('job:' .. id)), {id = id}
  for i = 1, #row, 2 do job[row[i]] = row[i + 1] end
  return job.state and job, row
end

-- Return {id, row, position}, or {} for no job. The position is {now}, and of a job that waits {now, seconds_per_unit,
-- ready, ready_work, work, workers, accounts, place, start_seconds}.
local function snapshot(job, row)
  if not job then return {} end
  local position = {now}
  if job.state == 'queued' then
    local load = redis.call('HMGET', K('load:' .. job.kind), 'seconds_per_unit', 'ready', 'ready_work', 'work',
      'start_seconds')
    position = {now, load[1] or '', load[2] or '0', load[3] or '0', load[4] or '0',
      redis.call('ZCARD', K('workers:' .. job.kind)), redis.call('ZCARD', K('vtime:' .. job.kind)),
      redis.call('ZRANK', K('queue:' .. job.kind .. ':' .. job.account), job.id) or -1, load[5] or ''}
  end
  return {job.id, row, position}
end
