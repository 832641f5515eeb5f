-- include permission
-- args: moved, loras:list
-- withdraw_moved: let the reaper look at the waiting jobs of these LoRAs whose base model is in `moved`, one a line.
for _, id in ipairs(loras) do
  if redis.call('EXISTS', K('lora_jobs:' .. id)) == 1 then
    local model = redis.call('HGET', K('lora:' .. id), 'base_model')
    if model and string.find('\n' .. moved, '\n' .. model .. '\n', 1, true) then withdraw(id) end
  end
end
