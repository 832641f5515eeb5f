-- args: worker_life_ms:number, every_ms:number, life_ms:number
-- take_sample: the LoRA whose sample picture is to be drawn now, or '': only while a worker lives and nothing waits for
-- one, and one in `every_ms`. A LoRA that waited longer than `life_ms` goes without. Run twice, one goes without, too.
redis.call('ZREMRANGEBYSCORE', K('loras_sampling'), '-inf', now - life_ms)
if redis.call('EXISTS', K('loras_sampling')) == 0 then return '' end
if redis.call('ZCARD', K('age:generation')) > 0 then return '' end
if redis.call('ZCOUNT', K('workers:generation'), now - worker_life_ms, '+inf') == 0 then return '' end
if not redis.call('SET', K('loras_sampled'), now, 'NX', 'PX', every_ms) then return '' end
return redis.call('ZPOPMIN', K('loras_sampling'))[1]
