// A real llama.cpp decodes with our drafters, and counts: token ids in, JSON out.
//
//     client TARGET.gguf DRAFTER.gguf|- TYPE DEPTH P_MIN MAX_NEW_TOKENS < PROMPTS > ANSWER.json
//
// TYPE is a value of llama.cpp's --spec-type ("none" decodes plainly, "-" for its drafter), P_MIN that of
// --spec-draft-p-min; a line of PROMPTS holds the token ids of one prompt. The answer is
//
//     [{"tokens": [...], "cycles": [[drafted, accepted], ...]}, ...]
//
// A proposal begins after the first token, as llama-server's do. Greedy, one thread, and every cache
// is float32; nothing ends a text but the limit, near which drafts are as long as elsewhere.
#include "common.h"
#include "log.h"
#include "sampling.h"
#include "speculative.h"

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>

using Cycles = std::vector<std::pair<size_t, size_t>>;

static void check(bool fine, const char * what) {
    if (!fine) {
        fprintf(stderr, "llama_cpp_client: %s\n", what);
        exit(1);
    }
}

static common_params settings(const char * target, const char * drafter, const char * type, int depth,
                              float p_min) {
    common_params params;
    params.model.path = target;
    params.n_ctx = params.n_batch = params.n_ubatch = 512;
    params.n_parallel = 1;
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1;
    params.cache_type_k = params.cache_type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.sampling.temp = 0.0f;
    auto & draft = params.speculative.draft;
    params.speculative.types = { common_speculative_type_from_name(type) };
    draft.mparams.path = std::string(drafter) == "-" ? "" : drafter;
    draft.n_max = depth;
    draft.n_min = 0;
    draft.p_min = p_min; // 0: no draft is cut
    draft.cache_type_k = draft.cache_type_v = GGML_TYPE_F32;
    const auto limits = common_speculative_get_output_limits(params.n_batch, 1, depth);
    params.n_outputs_max = limits.total;
    params.n_outputs_max_per_seq = limits.per_seq;
    return params;
}

static void decode(llama_context * target, common_batch & batch, common_speculative * speculative) {
    check(llama_process(target, LLAMA_PROCESS_TYPE_DECODE, batch.get()) == 0, "the target's pass failed");
    check(speculative == nullptr || common_speculative_process(speculative, batch), "the drafter's pass failed");
}

static void answer(common_params & params, llama_model * model, llama_context * target, const llama_tokens & prompt,
                   int max_new_tokens, llama_tokens & tokens, Cycles & cycles) {
    const bool plain = params.speculative.types[0] == COMMON_SPECULATIVE_TYPE_NONE;
    common_speculative_ptr speculative(plain ? nullptr : common_speculative_init(params.speculative, 1));
    check(plain || speculative, "no speculative decoding with this drafter");
    llama_context * drafter = params.speculative.draft.ctx_dft;
    for (llama_context * context : { target, drafter }) {
        if (context != nullptr) {
            llama_memory_clear(llama_get_memory(context), true);
        }
    }
    common_sampler_ptr sampler(common_sampler_init(model, params.sampling));
    llama_tokens past = prompt; // all but the last token
    common_batch batch(target);
    for (size_t i = 0; i < prompt.size(); ++i) {
        batch.add(prompt[i], i, 0, i + 1 == prompt.size());
    }
    decode(target, batch, speculative.get());
    common_speculative_begin(speculative.get(), 0, prompt);
    llama_token last = common_sampler_sample(sampler.get(), target, -1);
    common_sampler_accept(sampler.get(), last, true);
    tokens = { last };
    while ((int) tokens.size() < max_new_tokens) {
        const int place = past.size();
        llama_tokens draft;
        if (!plain) {
            common_speculative_get_draft_params(speculative.get(), 0) = { true, -1, place, last, &past, &draft };
            common_speculative_draft(speculative.get());
            llama_memory_seq_rm(llama_get_memory(drafter), 0, place, -1);
        }
        batch.clear();
        batch.add(last, place, 0, true);
        for (size_t i = 0; i < draft.size(); ++i) {
            batch.add(draft[i], place + 1 + i, 0, true);
        }
        decode(target, batch, speculative.get());
        // As common_sampler_sample_and_accept_n, which ends at an end token too.
        llama_tokens accepted;
        do {
            accepted.push_back(common_sampler_sample(sampler.get(), target, accepted.size()));
            common_sampler_accept(sampler.get(), accepted.back(), true);
        } while (accepted.size() <= draft.size() && draft[accepted.size() - 1] == accepted.back());
        if (!plain) {
            common_speculative_accept(speculative.get(), 0, accepted.size() - 1);
            cycles.emplace_back(draft.size(), accepted.size() - 1);
        }
        for (llama_token token : accepted) {
            past.push_back(last);
            tokens.push_back(last = token);
        }
        for (llama_context * context : { target, drafter }) {
            if (context != nullptr) {
                llama_memory_seq_rm(llama_get_memory(context), 0, past.size(), -1);
            }
        }
    }
    tokens.resize(max_new_tokens);
}

int main(int argc, char ** argv) {
    check(argc == 7, "TARGET.gguf DRAFTER.gguf|- TYPE DEPTH P_MIN MAX_NEW_TOKENS");
    common_log_set_verbosity_thold(-1);
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) {
            fputs(text, stderr);
        }
    }, nullptr);
    common_params params = settings(argv[1], argv[2], argv[3], atoi(argv[4]), atof(argv[5]));
    llama_backend_init();
    llama_model_ptr model(llama_model_load_from_file(argv[1], common_model_params_to_llama(params)));
    check(model != nullptr, "the target cannot be loaded");
    llama_context_ptr target(llama_init_from_model(model.get(), common_context_params_to_llama(params)));
    common_params drafting = common_base_params_to_speculative(params);
    auto drafter = common_speculative_init_from_params(drafting, model.get(), target.get());
    params.speculative.draft.ctx_tgt = target.get();
    params.speculative.draft.ctx_dft = drafter->context();
    printf("[");
    std::string line;
    for (int number = 0; std::getline(std::cin, line); ++number) {
        std::istringstream words(line);
        llama_tokens prompt, tokens;
        Cycles cycles;
        for (llama_token id; words >> id;) {
            prompt.push_back(id);
        }
        answer(params, model.get(), target.get(), prompt, atoi(argv[6]), tokens, cycles);
        printf("%s{\"tokens\": [", number == 0 ? "" : ",\n");
        for (size_t i = 0; i < tokens.size(); ++i) {
            printf("%s%d", i == 0 ? "" : ", ", tokens[i]);
        }
        printf("], \"cycles\": [");
        for (size_t i = 0; i < cycles.size(); ++i) {
            printf("%s[%zu, %zu]", i == 0 ? "" : ", ", cycles[i].first, cycles[i].second);
        }
        printf("]}");
    }
    printf("]\n");
    return 0;
}
